"""Sections of training: the optimizer, adapters, and the methods that are not RL."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from tandem.config.section import Section, name_of
from tandem.registry import names

LearningRate = Annotated[float, Field(gt=0, description="peak learning rate of AdamW")]
RATED = ("train", "sft", "preference")  # sections with a rate that may be "auto"
RateOrAuto = Annotated[
    Annotated[float, Field(gt=0)] | Literal["auto"],
    Field(
        description="peak learning rate of AdamW. auto: 5e-5 * (2000 / hidden size) ** p, with "
        "adapters ten times that; p is 0.781 for Llama, 0.0775 for Qwen (get_lr of tinker-cookbook "
        "0.6.1, fitted to SFT: refused for RL on all weights; the ten: LoRA Without Regret, 2025)"
    ),
]
Schedule = Annotated[
    Literal["constant", "linear", "cosine"], Field(description="shape after the warm-up")
]


def _refuse_compile(value: bool) -> bool:
    if value:
        raise ValueError(
            "expected false: torch.compile breaks off at every linear and in attention of the "
            "exact layer, whose operators its compiler cannot take; what is left is slower and has "
            "other bits (docs/develop/decisions/005-refused.md)"
        )
    return value


class Schedules(Section):
    """The learning rate over the optimizer steps of a run."""

    learning_rate: RateOrAuto = 1e-5
    schedule: Schedule = "constant"
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")


class Lora(Section):
    """Low-rank adapters in place of full training, for every command that trains."""

    rank: int = Field(0, ge=0, description="rank of the adapters; 0: all weights are trained")
    alpha: float = Field(16.0, gt=0, description="the adapter counts alpha / rank times")
    targets: list[str] = Field(
        ["all-linear"], description="modules that get one, e.g. q_proj, v_proj"
    )
    base: Literal["float", "nf4", "int8"] = Field(
        "float",
        description="what the frozen weights of the layers' linears are kept in. float: "
        "model.dtype; nf4: 4 bits, and a scale for 64 numbers (QLoRA); int8: 8 bits, and a scale "
        "for each row",
    )

    @property
    def is_quantized(self) -> bool:
        return self.base != "float"


class Train(Schedules):
    """The optimizer. [sft] and [preference] have a learning rate of their own; the other keys hold
    for every command."""

    optimizer: Annotated[str, name_of("optimizers")] = Field(
        "adamw",
        description="adamw_8bit: AdamW whose moments of matrices take 2 bytes a parameter in place "
        "of 8; muon: orthogonalized momentum for the matrices of the layers and of experts, "
        "AdamW for all else, at the same learning rate",
    )
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="muon: share of the momentum kept")
    backend: Annotated[str, name_of("trainers")] = Field(
        "tandem",
        description="what runs the trained models: Tandem's exact layers, or Megatron-Core's, "
        "whose log-probs differ from the engine's by rounding; or of a package with an entry point "
        "`tandem.trainers`",
    )
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta1")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW beta2")
    max_grad_norm: float = Field(
        1.0, gt=0, description="gradients are scaled down to this global norm"
    )
    tokens_per_microbatch: int = Field(
        8192, ge=16, description="token budget of one forward and backward pass"
    )
    activation_checkpointing: bool = Field(
        False,
        description="keep one activation per layer and recompute the others: less memory, more "
        "time, the same bits",
    )
    offload_optimizer: bool = Field(
        False,
        description="keep masters and moments in pinned host memory between updates: less memory "
        "of the GPU, more time, the same bits",
    )
    compile: Annotated[bool, AfterValidator(_refuse_compile)] = Field(
        False,
        description="torch.compile for each layer; refused, because it breaks off at every linear "
        "of the exact layer (docs/develop/decisions/005-refused.md)",
    )
    router_aux_loss_coef: float = Field(
        0.0,
        ge=0,
        description="weight of the loss that balances the experts of a mixture of experts (Switch "
        "Transformer); 0: off",
    )
    max_bad_steps: int = Field(
        3, ge=0, description="steps in a row lost to NaN or infinity before the run stops"
    )

    @property
    def can_offload(self) -> bool:
        """True if the optimizer can keep its state in host memory."""
        return self.optimizer in names("offload")


class SFT(Schedules):
    """`tandem sft`: supervised warm start on the same trainer."""

    learning_rate: RateOrAuto = 1e-4
    schedule: Schedule = "linear"
    train: str = Field(
        "", description="chats, JSONL or Parquet, with `messages`, or with `prompt` and `response`"
    )
    loss_on: Literal["assistant", "all"] = Field(
        "assistant", description="what carries loss: the assistant's turns, or everything"
    )
    steps: int = Field(100, ge=1, description="optimizer steps")
    batch_size: int = Field(64, ge=1, description="chats in a step")


class Preference(Schedules):
    """`tandem dpo` and `tandem rm`: learning from pairs of a chosen and a rejected answer."""

    learning_rate: RateOrAuto = 1e-6
    schedule: Schedule = "linear"
    train: str = Field(
        "", description="pairs, JSONL or Parquet, with `prompt`, `chosen` and `rejected`"
    )
    test: str = Field("", description="held-out pairs, for the accuracy before and after")
    steps: int = Field(100, ge=1, description="optimizer steps")
    batch_size: int = Field(64, ge=1, description="pairs in a step")
    loss: Literal["dpo", "ipo"] = Field("dpo", description="dpo: loss of `tandem dpo`")
    beta: float = Field(0.1, gt=0, description="dpo: strength of the KL to the reference")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="dpo: share of pairs assumed to be labelled the wrong way"
    )
    length_normalized: bool = Field(
        False,
        description="dpo: mean log-prob of the tokens instead of their sum; true by default for "
        "ipo",
    )
    nll_coef: float = Field(
        0.0,
        ge=0,
        description="dpo: weight of the chosen answer's mean negative log-likelihood in the loss",
    )

    @model_validator(mode="before")
    @classmethod
    def _normalize_ipo(cls, given: Any) -> Any:
        """Let IPO compare means over tokens, as its authors do, unless the recipe differs."""
        is_ipo = isinstance(given, dict) and given.get("loss") == "ipo"
        return {"length_normalized": True, **given} if is_ipo else given


class Distill(Section):
    """`tandem distill`: on-policy distillation from a teacher, over the problems and steps of
    `tandem train`."""

    teacher: str = Field(
        "", description="Hugging Face directory or hub name of a model with the same tokenizer"
    )
    estimator: Literal["exact", "sampled"] = Field(
        "exact",
        description="the divergence over the vocabulary at each position, or the reverse KL at the "
        "sampled token only",
    )
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = Field(
        "reverse_kl",
        description="exact: KL from student to teacher, from teacher to student, or from both to "
        "their mixture",
    )
    jsd_beta: float = Field(0.5, gt=0, lt=1, description="jsd: the teacher's share of the mixture")
    top_k: int = Field(
        0,
        ge=0,
        description="exact: the teacher's k likeliest tokens, and all others as one; 0: every "
        "token",
    )

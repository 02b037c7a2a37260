"""On-policy distillation: the student samples, the teacher grades every token (GKD, arXiv
2306.13649; Lu 2025).

A divergence takes log-probs of student and teacher, float32 [N, V], and returns float32 [N], nats,
with its slope [N, V] in the student's logits; both are exactly 0 where the two are equal.
`sampled_advantages` needs the teacher's log-prob of the sampled token only.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tandem.model.logprobs import row_sums

DivergenceKind = Literal["reverse_kl", "forward_kl", "jsd"]


def reverse_kl(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Compute KL(student || teacher): the student seeks the teacher's modes (MiniLLM, arXiv
    2306.08543)."""
    gap, p = student - teacher, student.exp()
    value = row_sums(p * gap)
    return value, p * (gap - value[:, None])


def forward_kl(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Compute KL(teacher || student): the student covers the teacher's modes (Hinton et al.
    2015)."""
    q = teacher.exp()
    return row_sums(q * (teacher - student)), student.exp() - q


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Compute beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta)
    student (generalized Jensen-Shannon divergence, GKD, arXiv 2306.13649, eq. 1)."""
    gap = teacher - student
    # log m; in this form it is log p itself if p = q
    below = student + torch.log1p(beta * gap.clamp(max=0).expm1())
    above = teacher + torch.log1p((1 - beta) * (-gap).clamp(max=0).expm1())
    mixture = torch.where(gap > 0, above, below)
    p, slope = student.exp(), (1 - beta) * (student - mixture)
    from_student = row_sums(p * slope)
    return beta * row_sums(teacher.exp() * (teacher - mixture)) + from_student, p * (
        slope - from_student[:, None]
    )


def divergence(
    kind: DivergenceKind, student: Tensor, teacher: Tensor, *, beta: float, top_k: int
) -> tuple[Tensor, Tensor]:
    """Compute a divergence: (nats [N], slope [N, V]). beta: of jsd.

    top_k k > 0 looks at k + 1 outcomes, the teacher's k likeliest tokens and any other. These are
    distributions still, so the divergence is never negative, and at most that over all tokens.
    """
    if not top_k:
        return _divergence(kind, student, teacher, beta)
    tokens = teacher.topk(min(top_k, teacher.shape[-1]), -1).indices
    own, other = _grouped(student, tokens), _grouped(teacher, tokens)
    value, slope = _divergence(kind, own, other, beta)
    # each of them has its share of the last outcome's slope
    others = student.exp().scatter(1, tokens, 0.0)
    return value, (others * (slope[:, -1:] / own[:, -1:].exp())).scatter(1, tokens, slope[:, :-1])


def _divergence(
    kind: DivergenceKind, student: Tensor, teacher: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    match kind:
        case "reverse_kl":
            return reverse_kl(student, teacher)
        case "forward_kl":
            return forward_kl(student, teacher)
        case "jsd":
            return jensen_shannon(student, teacher, beta)


def _grouped(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """Group the vocabulary, [N, V] -> [N, k + 1]: the given tokens, and all others, which are
    summed up, as 1 minus the rest would cancel."""
    rest = (
        row_sums(logprobs.exp().scatter(1, tokens, 0.0))
        .clamp_min(torch.finfo(logprobs.dtype).tiny)
        .log()
    )
    return torch.cat([logprobs.gather(1, tokens), rest[:, None]], 1)


def sampled_advantages(student_logprobs: np.ndarray, teacher_logprobs: np.ndarray) -> np.ndarray:
    """Compute teacher - student at each sampled token, float32 [N].

    With a policy loss it is the score-function estimator of the gradient of sum_t KL(student ||
    teacher) in which each token answers for its own term only (discount 0).
    """
    return teacher_logprobs - student_logprobs

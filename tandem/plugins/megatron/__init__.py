"""Megatron-Core as what runs the trained models: train.backend = megatron.

For anyone who has models or meshes that Megatron knows better than FSDP2. Rollouts stay Tandem's
engine, so log-probs differ by rounding: each step measures the gap and needs rl.correction.

    trainer.py   the choice: what goes with it, models that are refused, how its ranks are opened
    core.py      a GPTModel from a Hugging Face config; the one file that imports Megatron
    model.py     the model as algorithms see it, and its passes over the processes of a mesh
    weights.py   where the parts of Hugging Face weights lie in Megatron's

It plugs in as a trainer of tandem/registry.py. Extra: `megatron`. No GPU has run it.
"""

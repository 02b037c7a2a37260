"""On-policy distillation: the student samples, the teacher grades every token (GKD, arXiv 2306.13649; Lu 2025).

The exact reverse KL over the vocabulary needs both models' logits and is `model.logprobs.reverse_kl`; here is the
estimator that needs the teacher's log-prob of the sampled token only.
"""

import numpy as np


def sampled_advantages(student_logprobs: np.ndarray, teacher_logprobs: np.ndarray) -> np.ndarray:
    """teacher - student at each sampled token, float32 [N]: with a policy loss, the score-function estimator of the
    gradient of sum_t KL(student || teacher) where each token answers for its own term only (discount 0)."""
    return teacher_logprobs - student_logprobs

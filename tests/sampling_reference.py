"""What temperature and filters make of a distribution, in numpy, for every implementation of it."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from mrl.types import SamplingParams

sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.8]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 500]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)


def reference_probs(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """The distribution one row is drawn from, token by token in float64: temperature, min-p, top-k, top-p."""
    x = logits.astype(np.float64) / p.temperature
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    probs = np.where(probs < p.min_p * probs.max(), 0.0, probs)
    if p.top_k:
        kth = np.sort(probs)[::-1][min(p.top_k, len(probs)) - 1]
        probs = np.where(probs < kth, 0.0, probs)
    probs /= probs.sum()
    if p.top_p < 1:
        kept, mass = np.zeros_like(probs), 0.0
        for token in np.argsort(-probs, kind="stable"):
            if mass >= p.top_p:
                break
            kept[token] = probs[token]
            mass += probs[token]
        probs = kept / kept.sum()
    return probs

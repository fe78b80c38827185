"""Whether a prediction of speed is worth starting from: does it order what was measured?"""

import numpy as np

from orchestrator.search.residuals import Floats

LEAST_LAUNCHES = 5
"""Measured speeds that it takes to give a prediction up."""
LEAST_CORRELATION = 0.3
"""Between predicted and measured log speed. Below, a search without the prediction needs no more launches
(`research` of the sampler: structured errors of 0.4 in log speed, at which both are alike, leave a correlation of 0.3
to 0.4)."""
CONTRAST = 0.4
"""Range of predicted log speed, over which the correlation says something: the search looks where speed is predicted
to be high, and among predictions that differ by no more than their own error, order is chance."""


def has_contrast(predicted: Floats) -> bool:
    """Whether predictions of these trials differ by enough to be judged by them."""
    return len(predicted) > 1 and float(np.ptp(predicted)) >= CONTRAST


def orders(predicted: Floats, measured: Floats) -> bool:
    """Whether predicted log speeds go with the measured ones."""
    if np.ptp(predicted) == 0 or np.ptp(measured) == 0:
        return False
    return float(np.corrcoef(predicted, measured)[0, 1]) >= LEAST_CORRELATION


def is_useless(predicted: Floats, measured: Floats) -> bool:
    """Whether the trials so far show that the prediction is no guide."""
    return len(measured) >= LEAST_LAUNCHES and has_contrast(predicted) and not orders(predicted, measured)


def wants_contrast(predicted: Floats, measured: Floats, running: Floats) -> bool:
    """Whether a trial of another predicted speed should be next: these say that the prediction is no guide, but differ
    too little to be sure. One launch before a prediction may be given up, so that it is in time."""
    return (
        len(measured) >= LEAST_LAUNCHES - 1
        and not has_contrast(np.concatenate([predicted, running]))
        and not orders(predicted, measured)
    )

"""How often to save: the interval that loses least, from the cost of a save and the failures.

Both formulas minimise expected lost time for failures that come at random (exponentially).
"""

import math


def young(cost_s: float, mtbf_s: float) -> float:
    """Return Young's first-order optimum sqrt(2 C M), seconds of training between saves.

    Source: J. W. Young, Communications of the ACM 17(9), 1974.

    >>> round(young(30.0, 10800.0))
    805
    """
    return math.sqrt(2.0 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's higher-order optimum, seconds of training between saves.

    It corrects Young's where a save is not short against the time between failures, and is the
    latter itself once a save costs twice that.
    Source: J. T. Daly, Future Generation Computer Systems 22(3), 2006, equation 37.

    >>> round(daly(30.0, 10800.0))
    785
    """
    if cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2.0 * mtbf_s)
    return young(cost_s, mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost_s

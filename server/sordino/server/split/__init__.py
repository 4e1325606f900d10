"""``sordino split``: a model of ``transformers`` becomes a client part and integer matrices for the server."""

from sordino.server.split.calibrate import CalibrationWarning
from sordino.server.split.pipeline import Progress, Rounding, split_model
from sordino.server.split.report import SplitReport

__all__ = ["CalibrationWarning", "Progress", "Rounding", "SplitReport", "split_model"]

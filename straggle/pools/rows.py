"""What the rows of a step say of its pool; a rank without a part in it says nothing.

`StepReport` has these numbers by the same names: the largest of all ranks.
"""

from __future__ import annotations

from straggle.merge.rows.telemetry import Column

PARTS = Column("pool_parts", unusual=True)
WEIGHT = Column("pool_weight")
ATTEMPTS = Column("pool_attempts")  # 0: what is lost of the pool is not computed again
COLUMNS = (PARTS, WEIGHT, ATTEMPTS)

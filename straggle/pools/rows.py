"""What the rows of a step say of its pool; a rank without a part in it says nothing.

`StepReport` has the first three by the same names: the largest of all ranks.
"""

from __future__ import annotations

from straggle.merge.rows.telemetry import Column

PARTS = Column("pool_parts", unusual=True)
WEIGHT = Column("pool_weight")
ATTEMPTS = Column("pool_attempts")  # 0: what is lost of the pool is not computed again
COMPUTED = Column("pool_computed")  # what the micro-batches that it computed cost, in mean ones
COSTS = Column("pool_costs")  # a number for what all of them cost; 0: as long as each other
COLUMNS = (PARTS, WEIGHT, ATTEMPTS, COMPUTED, COSTS)

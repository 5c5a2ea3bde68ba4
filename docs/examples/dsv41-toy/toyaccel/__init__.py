"""The vendor's library of the Toy A1, emulated in torch. It knows nothing of dsv41.

The device works on tensors in the host's memory. Like real ones it is particular: it takes query heads in sixteens,
rows as dense int32 lists with a length and no gaps, and pages whose values lie in tiles of 8 rows. Where a token has
no row at all it leaves the output as it was.
"""

from toyaccel.attention import attend
from toyaccel.scores import score

__version__ = "1.2.0"
__all__ = ["attend", "score"]

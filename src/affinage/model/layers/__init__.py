"""The layers that come with the package; importing this registers them."""

from affinage.model.layers import block as block
from affinage.model.layers import losses as losses

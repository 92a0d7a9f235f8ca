"""Starting the hosts of a run, and starting them again."""

from affinage.launch.gang import Elastic as Elastic
from affinage.launch.gang import Ending as Ending
from affinage.launch.gang import Gang as Gang
from affinage.launch.gang import Launcher as Launcher
from affinage.launch.gang import Restarts as Restarts
from affinage.launch.local import LocalLauncher as LocalLauncher
from affinage.launch.supervise import supervise as supervise

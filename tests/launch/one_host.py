"""One host of a small training, for launchers that start processes: its job is the argument, see `gangs.py`."""

import json
import os
import sys

from affinage.stopping import die_with_parent, left_when_done

if __name__ == "__main__":
    die_with_parent()
    import gangs

    sys.path.insert(0, str(gangs.TRAINING))
    from affinage.hardware.devices import prepare

    prepare()
    with left_when_done():
        sys.exit(gangs._train(json.loads(sys.argv[1]), int(os.environ["AFFINAGE_HOST"])))

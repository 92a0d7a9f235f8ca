"""The processes of a run on one or many machines, and the tasks of a data step on them: how all are started."""

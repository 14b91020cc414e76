"""What the study trains: a data set, a model and how, by name."""

from ordain.study.tasks.catalogue import TASKS
from ordain.study.tasks.task import Defaults, Problem, Task

__all__ = ["TASKS", "Defaults", "Problem", "Task"]

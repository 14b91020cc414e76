"""The study's tasks by name: a data set, a model, and how to train it."""

from ordain.study.tasks.task import Defaults, LoadedTask, Task
from ordain.study.tasks.task_list import TASKS

__all__ = ["TASKS", "Defaults", "LoadedTask", "Task"]

"""Pipeline parallelism: stages, schedules, and the engine behind `model(**batch)`."""

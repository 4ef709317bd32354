"""Context parallelism: sequences over ranks, exactly, with the work of attention shared out evenly."""

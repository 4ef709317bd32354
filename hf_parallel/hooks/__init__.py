"""The only room that knows the internals of Trainer, Accelerate, PEFT and TRL; `activation` puts patches in place."""

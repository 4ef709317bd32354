"""PEFT: adapters on parallel bases."""

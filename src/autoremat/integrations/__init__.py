"""Where people train: callbacks for Transformers' Trainer and for Lightning. Each module needs its library."""

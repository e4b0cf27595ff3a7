"""Records a model's step once and replays it often: slots, memory plan, backends. Knows no requests and no text."""

"""What runs next: requests' states, the scheduler, the loop, the client of all front ends. Knows no HTTP, no model."""

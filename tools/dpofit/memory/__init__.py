"""From a Job to an event program, its peaks, limits and notes; closed form, no torch."""

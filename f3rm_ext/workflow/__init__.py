"""Long work of several commands: their stages, a manifest, the runner, and the reports of both workflows."""

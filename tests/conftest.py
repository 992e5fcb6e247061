"""Settings of every test run: hypothesis without wall-clock judgements (machines are noisy)."""

from hypothesis import HealthCheck, settings

pytest_plugins = ["records"]

settings.register_profile(
    "phalanx", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("phalanx")

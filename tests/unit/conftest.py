"""How long an example takes says how busy the machine is, so no test fails by it. Where ``CI`` is set hypothesis sees to that itself, and draws the same examples each time."""

from __future__ import annotations

import hypothesis

if hypothesis.settings.get_current_profile_name() == "default":
    hypothesis.settings.register_profile(
        "timeless", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("timeless")

from pools.fixtures import home, ray_token, tests_importable

__all__ = ["home", "ray_token", "tests_importable"]

"""OpenEnv environments: behind a server, a container or a class, asked over their own protocol (docs/openenv.md)."""

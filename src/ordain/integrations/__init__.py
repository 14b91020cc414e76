"""Orders inside training frameworks, each imported only when it is used: see docs/frameworks.md."""

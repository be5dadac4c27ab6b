"""halfback where people train already. Each file needs the library that it is named for, and is imported by who uses that."""

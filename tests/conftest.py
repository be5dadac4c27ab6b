import zoo  # noqa: F401  declares what a CPU torch lacks, before anything imports torchvision

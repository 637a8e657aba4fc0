"""Published statistics of workloads: quantile tables with their sources. No rows of any trace."""

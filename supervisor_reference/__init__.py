"""The reference control supervisor: runs beside a workload and drives its isolation backend."""

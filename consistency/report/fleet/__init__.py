"""The report of a fleet: `report.json` of schema `consistency.report/2`, in which groups stand for workers."""

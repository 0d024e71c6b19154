"""Finding out why: a finding taken apart, shown without this tool, and faults planted to see them found."""

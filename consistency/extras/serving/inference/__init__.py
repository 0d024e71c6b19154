"""Another inference engine as one more worker of `forward`: what it is asked, and the file that it answers with."""

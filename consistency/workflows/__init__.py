"""What a user asks for as a whole: run, drill, doctor, bisect, reproduce."""

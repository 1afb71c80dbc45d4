"""Studies of captured calls, a file each: what is measured, and the report on it. `study` has what they share,
`subject` the call that is looked at."""

module kernels

go 1.25

require (
	github.com/janpfeifer/gonb v0.11.3
	golang.org/x/tools v0.38.0
)

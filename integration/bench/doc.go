// Command bench measures from the start of a program to its end, in a jail and
// beside it.
//
// Every row starts the same static "true". The rows take turns in a random
// order, each start after a pause, in one run on one machine: compare rows of
// one run only. A row that fails once is reported with its error and no time.
package main

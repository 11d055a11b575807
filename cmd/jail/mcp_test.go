package main

import (
	"context"
	"fmt"
	"os"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// mcpServer is a real MCP server on stdio, run as the command "mcpserver" by the
// scripts: two tools of a weather service.
func mcpServer() {
	server := mcp.NewServer(&mcp.Implementation{Name: "weather", Version: "1"}, nil)
	type in struct {
		City string `json:"city" jsonschema:"name of the city"`
		Days int    `json:"days,omitempty"`
	}
	type out struct {
		Degrees []int `json:"degrees"`
	}
	mcp.AddTool(server, &mcp.Tool{Name: "get-forecast", Description: "Degrees of the next days."},
		func(_ context.Context, _ *mcp.CallToolRequest, i in) (*mcp.CallToolResult, out, error) {
			if i.City == "" || i.City == "Atlantis" {
				return nil, out{}, fmt.Errorf("no city %q", i.City)
			}
			o := out{Degrees: []int{}}
			for d := range max(i.Days, 1) {
				o.Degrees = append(o.Degrees, 20+d)
			}
			return nil, o, nil
		})
	mcp.AddTool(server, &mcp.Tool{Name: "hidden", Description: "Not offered."},
		func(context.Context, *mcp.CallToolRequest, struct{}) (*mcp.CallToolResult, struct{}, error) {
			return nil, struct{}{}, nil
		})
	if err := server.Run(context.Background(), &mcp.StdioTransport{}); err != nil {
		os.Exit(1)
	}
}

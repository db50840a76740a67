"""Tasks on a Ray cluster: the engine `ray`, which enters lora-tool by an entry point."""

from lora_tool_ray.ray_cluster import RayCluster as RayCluster

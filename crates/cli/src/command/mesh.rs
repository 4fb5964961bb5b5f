//! `trainyard mesh`: the coordinates and groups of all ranks.

use std::process::ExitCode;

use clap::Args;
use serde_json::{Map, Value, json};
use trainyard_mesh::{Axis, Mesh as DeviceMesh, MeshDiagram, MeshError};

use super::ConfigFile;
use crate::failure::Failure;

/// Show the mesh of a config
///
/// One line; with `--show` a diagram: the coordinates and experts of every rank, and the groups that
/// exchange tokens, reduce gradients and shard states.
#[derive(Debug, Args)]
#[command(
    override_usage = "trainyard mesh CONFIG.toml --world N [--show | --json] [--SECTION.KEY VALUE]...",
    after_help = "Examples:\n  \
    trainyard mesh configs/small_moe.toml --world 4 --show --parallelism.data_parallel_shard_degree 4\n  \
    trainyard mesh configs/deepseek-v3.toml --world 2048"
)]
pub struct Mesh {
    #[command(flatten)]
    config: ConfigFile,
    /// Number of ranks of the job
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    world: u64,
    /// Draw the mesh
    #[arg(long)]
    show: bool,
    /// Print JSON: the size of every axis, and the coordinates of every rank
    #[arg(long, conflicts_with = "show")]
    json: bool,
}

impl Mesh {
    /// Prints the mesh.
    pub fn execute(self, overrides: &[String]) -> Result<ExitCode, Failure> {
        let config = self.config.load(overrides)?;
        let mesh = config.mesh(self.world as usize).map_err(Failure::new)?;
        if self.json {
            println!("{}", as_json(&mesh).map_err(Failure::new)?);
            return Ok(ExitCode::SUCCESS);
        }
        if !self.show {
            println!("{mesh}");
            return Ok(ExitCode::SUCCESS);
        }
        let spec = config.model.resolve().map_err(Failure::new)?;
        let num_experts = spec.experts().map_or(0, |experts| experts.num_experts);
        let is_sharded = config.parallelism.zero_stage > 0;
        print!("{}", MeshDiagram::new(mesh, num_experts, is_sharded));
        Ok(ExitCode::SUCCESS)
    }
}

/// The sizes of the axes, and the coordinates of every rank along axes with more than one rank.
fn as_json(mesh: &DeviceMesh) -> Result<Value, MeshError> {
    let axes: Vec<_> = mesh.active().iter().collect();
    let ranks = (0..mesh.world_size()).map(|rank| {
        let coordinates = mesh.coordinates(rank)?;
        let along = |axis: &Axis| (axis.name().to_owned(), coordinates.get(*axis).into());
        Ok(Value::Object(axes.iter().map(along).collect::<Map<_, _>>()))
    });
    let ranks = ranks.collect::<Result<Vec<_>, MeshError>>()?;
    Ok(json!({ "world_size": mesh.world_size(), "mesh": mesh, "coordinates": ranks }))
}

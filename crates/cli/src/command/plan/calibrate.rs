//! `trainyard plan calibrate`: writes a cluster file from measurements.

use std::io::{Read, stdin};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use trainyard_plan::calibrate::{calibrate, read_matmuls, read_tables};

use super::request::cluster;
use super::{read, write};
use crate::failure::Failure;

/// Write a cluster file from nccl-tests output and a sweep of matrix products
///
/// Reads the output of all_reduce_perf, all_gather_perf, reduce_scatter_perf, alltoall_perf and sendrecv_perf.
/// Tables of one node determine the links, those of several nodes the network.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard plan calibrate --cluster 64xH100 all_reduce_perf.txt alltoall_perf.txt --output cluster.toml\n  \
    all_reduce_perf -b 8 -e 4G -f 2 -g 8 | trainyard plan calibrate --cluster 8xH100 -\n  \
    trainyard plan calibrate --cluster 64xH100 --matmul sweep.csv --output cluster.toml")]
pub(super) struct Calibrate {
    /// Output files of nccl-tests; `-` is the standard input
    #[arg(value_name = "FILE", required_unless_present = "matmul")]
    files: Vec<PathBuf>,
    /// The cluster: a short form such as 64xH100, or a cluster TOML
    #[arg(long, value_name = "CLUSTER")]
    cluster: String,
    /// A sweep of matrix products: CSV with the header m,n,k,tflops or m,n,k,seconds
    #[arg(long, value_name = "FILE")]
    matmul: Option<PathBuf>,
    /// Where to write the cluster file; defaults to stdout
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl Calibrate {
    /// Reads the measurements, fits the figures and writes the cluster file.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        let cluster = cluster(&self.cluster)?;
        let mut tables = Vec::new();
        for path in &self.files {
            let text = text(path)?;
            let name = path.display().to_string();
            tables.extend(read_tables(&name, &text).map_err(Failure::new)?);
        }
        let matmuls = match &self.matmul {
            Some(path) => {
                let name = path.display().to_string();
                read_matmuls(&name, &read(path)?).map_err(Failure::new)?
            }
            None => Vec::new(),
        };
        let calibrated = calibrate(&cluster, &tables, &matmuls).map_err(Failure::new)?;
        let notes = calibrated.notes.iter().map(|note| format!("# {note}\n"));
        let file = format!(
            "{}{}",
            notes.collect::<String>(),
            calibrated.cluster.to_toml()
        );
        match &self.output {
            Some(path) => {
                write(path, &file)?;
                calibrated.notes.iter().for_each(|note| println!("{note}"));
            }
            None => print!("{file}"),
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn text(path: &Path) -> Result<String, Failure> {
    if path.as_os_str() != "-" {
        return read(path);
    }
    let mut text = String::new();
    let read = stdin().read_to_string(&mut text);
    read.map_err(|error| Failure::new(format!("cannot read the standard input: {error}")))?;
    Ok(text)
}

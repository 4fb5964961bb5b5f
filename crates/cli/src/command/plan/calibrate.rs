//! `trainyard plan calibrate`: a cluster file from measurements.

use std::io::{Read, stdin};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use trainyard_plan::calibrate::{calibrate, read_products, read_tables};

use super::question::cluster;
use super::{read, write};
use crate::failure::Failure;

/// Make a cluster file from nccl-tests' output and a sweep of matrix products
///
/// Outputs of all_reduce_perf, all_gather_perf, reduce_scatter_perf, alltoall_perf and sendrecv_perf are
/// taken as they were printed. Those of one machine give links, those of several the network.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard plan calibrate --cluster 64xH100 all_reduce_perf.txt alltoall_perf.txt --output cluster.toml\n  \
    all_reduce_perf -b 8 -e 4G -f 2 -g 8 | trainyard plan calibrate --cluster 8xH100 -\n  \
    trainyard plan calibrate --cluster 64xH100 --matmul sweep.csv --output cluster.toml")]
pub(super) struct Calibrate {
    /// What nccl-tests printed; `-` is the standard input
    #[arg(value_name = "FILE", required_unless_present = "matmul")]
    files: Vec<PathBuf>,
    /// The machines: as in 64xH100, or a cluster TOML
    #[arg(long, value_name = "CLUSTER")]
    cluster: String,
    /// A sweep of matrix products: CSV with the header m,n,k,tflops or m,n,k,seconds
    #[arg(long, value_name = "FILE")]
    matmul: Option<PathBuf>,
    /// Where to write the cluster file; the standard output if not given
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl Calibrate {
    /// Reads, fits and writes.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        let cluster = cluster(&self.cluster)?;
        let mut tables = Vec::new();
        for path in &self.files {
            let text = text(path)?;
            let name = path.display().to_string();
            tables.extend(read_tables(&name, &text).map_err(Failure::new)?);
        }
        let products = match &self.matmul {
            Some(path) => {
                let name = path.display().to_string();
                read_products(&name, &read(path)?).map_err(Failure::new)?
            }
            None => Vec::new(),
        };
        let found = calibrate(&cluster, &tables, &products).map_err(Failure::new)?;
        let notes = found.notes.iter().map(|note| format!("# {note}\n"));
        let file = format!("{}{}", notes.collect::<String>(), found.cluster.to_toml());
        match &self.output {
            Some(path) => {
                write(path, &file)?;
                found.notes.iter().for_each(|note| println!("{note}"));
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
    read.map_err(|error| Failure::new(format!("the standard input: {error}")))?;
    Ok(text)
}

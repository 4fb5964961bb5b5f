//! `trainyard train`: one rank of a training job.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::config::keys_by_section;
use super::foreign::{self, ForeignConfig};
use super::{ConfigFile, auto};
use crate::engine;
use crate::failure::Failure;

const EXAMPLES: &str = "Examples:\n  \
    trainyard train configs/llama-tiny.toml --training.steps 100\n  \
    trainyard run --standalone --nproc-per-node 2 -- trainyard train configs/llama-tiny.toml\n  \
    trainyard train model.toml --from ds_config.json\n  \
    trainyard train model.toml --from ds_config.json --ignore curriculum_learning --print-config\n  \
    trainyard train torchtitan.toml --training.dataset_path tokens";

/// Train a model from a config file
///
/// Trains on one rank. Start it with `trainyard run` to train on several ranks, which find each other
/// through torchrun's environment variables. With --from it takes the settings of another framework's config, reports
/// what each of its keys becomes, and trains. Later settings win: CONFIG.toml, --from, --SECTION.KEY.
#[derive(Debug, Args)]
#[command(
    override_usage = "trainyard train CONFIG.toml [--from FILE [--ignore KEY]...] [--SECTION.KEY VALUE]...",
    after_help = EXAMPLES
)]
pub struct Train {
    /// The config file; any key can be overridden as in `--training.steps 100`. A torchtitan TOML is translated
    #[arg(value_name = "CONFIG.toml", required_unless_present = "from")]
    config: Option<PathBuf>,
    /// Another framework's config to take settings from: DeepSpeed JSON, Accelerate YAML, torchtitan TOML, or a
    /// Megatron-LM script. CONFIG.toml describes the model; it may be left out if FILE does
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Train without this key of FILE, although it changes the result; may be repeated
    #[arg(long, value_name = "KEY", allow_hyphen_values = true)]
    ignore: Vec<String>,
    /// Print the config with all its keys, and exit
    #[arg(long)]
    print_config: bool,
}

/// A config without keys, for jobs whose settings all come from another framework's config.
const EMPTY_CONFIG: &str = "/dev/null";

/// The end of the long help: examples, and the keys of the config.
pub fn long_help_end() -> String {
    format!("{EXAMPLES}\n\n{}", keys_by_section())
}

impl Train {
    /// Validates the config and replaces this process by the engine.
    pub fn execute(self, overrides: &[String]) -> Result<ExitCode, Failure> {
        let (path, settings) = self.settings(overrides)?;
        let config = ConfigFile { config: path };
        let loaded = config.load(&settings)?;
        let chosen = auto::choice(&loaded, auto::world_size())?;
        let settings = [settings, chosen].concat();
        if self.print_config {
            let config = config.load(&settings)?;
            print!("{}", config.to_toml().map_err(Failure::new)?);
            return Ok(ExitCode::SUCCESS);
        }
        let arguments = [OsString::from("train"), config.config.into_os_string()];
        let settings = settings.into_iter().map(OsString::from);
        Err(engine::hand_over_as(arguments.into_iter().chain(settings)))
    }

    /// The config file, and the settings that override it.
    fn settings(&self, overrides: &[String]) -> Result<(PathBuf, Vec<String>), Failure> {
        let Some((foreign, config)) = self.foreign()? else {
            if let Some(key) = self.ignore.first() {
                return Err(Failure::usage(format!(
                    "--ignore {key} needs another framework's config"
                ))
                .hint("name it with --from"));
            }
            return Ok((self.config.clone().unwrap_or_default(), overrides.to_vec()));
        };
        let translated = foreign.translate(&self.ignore, config.is_some())?;
        let path = config.unwrap_or_else(|| EMPTY_CONFIG.into());
        Ok((path, [translated, overrides.to_vec()].concat()))
    }

    /// The other framework's config, if there is one, and our own, if there is one.
    fn foreign(&self) -> Result<Option<(ForeignConfig, Option<PathBuf>)>, Failure> {
        match (&self.from, &self.config) {
            (Some(from), config) => Ok(Some((foreign::load(from, None)?, config.clone()))),
            (None, Some(config)) => Ok(foreign::load_torchtitan(config).map(|found| (found, None))),
            (None, None) => Ok(None),
        }
    }
}

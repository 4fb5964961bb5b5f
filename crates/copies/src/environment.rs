//! How a worker learns of the holders: by variables that the launcher sets.

use std::path::PathBuf;

use crate::{Neighbourhood, NeighbourhoodError, PeerStore, Secret, SecretError};

/// The holders of all hosts, `HOST:PORT,HOST:PORT`, in the order of hosts.
pub const HOLDERS: &str = "TRAINYARD_HOLDERS";
/// Which of them is this host's.
pub const HOLDER_INDEX: &str = "TRAINYARD_HOLDER_INDEX";
/// The file with the run's secret; the secret itself is in no environment.
pub const SECRET_FILE: &str = "TRAINYARD_SECRET_FILE";

/// Why the environment cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EnvironmentError {
    /// A variable is missing or no number.
    #[error("{HOLDERS} is set, but {name} is missing or wrong: start workers by `trainyard run`")]
    Variable {
        /// Which.
        name: &'static str,
    },
    /// The list of holders makes no sense.
    #[error("{HOLDERS}: {0}")]
    Holders(#[from] NeighbourhoodError),
    /// The secret cannot be used.
    #[error(transparent)]
    Secret(#[from] SecretError),
}

/// The memory of this worker's peers; none when it was started by something that has no holders.
pub fn from_environment(
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<PeerStore>, EnvironmentError> {
    let Some(holders) = variable(HOLDERS) else {
        return Ok(None);
    };
    let missing = |name| EnvironmentError::Variable { name };
    let index = variable(HOLDER_INDEX).and_then(|index| index.parse().ok());
    let index = index.ok_or_else(|| missing(HOLDER_INDEX))?;
    let secret = variable(SECRET_FILE).ok_or_else(|| missing(SECRET_FILE))?;
    let neighbourhood = Neighbourhood::parse(&holders, index)?;
    let secret = Secret::read(&PathBuf::from(secret))?;
    Ok(Some(PeerStore::new(neighbourhood, secret)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_it_or_none() {
        let shared = Secret::generate().unwrap();
        let path = shared.path.display().to_string();
        let all = [
            (HOLDERS, "a:1,b:2"),
            (HOLDER_INDEX, "1"),
            (SECRET_FILE, &path),
        ];
        let with = |variables: &[(&str, &str)]| {
            let find = |name: &str| variables.iter().find(|(key, _)| *key == name);
            from_environment(|name| find(name).map(|(_, value)| (*value).to_owned()))
        };
        assert!(with(&[]).unwrap().is_none());
        assert!(with(&all[1..]).unwrap().is_none());
        assert!(with(&all).unwrap().is_some());
        assert!(with(&all[..2]).is_err());
        assert!(with(&[all[0], all[2]]).is_err());
        assert!(with(&[all[0], (HOLDER_INDEX, "2"), all[2]]).is_err());
    }
}

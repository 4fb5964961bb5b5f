//! How a worker learns of the holders: by variables that the launcher sets.

use std::path::PathBuf;

use crate::{Neighbourhood, NeighbourhoodError, PeerStore, Secret, SecretError};

/// The holders of all hosts, `HOST:PORT,HOST:PORT`, in the order of hosts.
pub const HOLDERS: &str = "TRAINYARD_HOLDERS";
/// The holder of this host, where hosts come and go and workers learn of the others' when they meet.
pub const HOLDER: &str = "TRAINYARD_HOLDER";
/// Which of them is this host's.
pub const HOLDER_INDEX: &str = "TRAINYARD_HOLDER_INDEX";
/// The file with the run's secret; the secret itself is in no environment.
pub const SECRET_FILE: &str = "TRAINYARD_SECRET_FILE";

/// Why the environment cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EnvironmentError {
    /// A variable is missing or no number.
    #[error(
        "there are holders of copies, but {name} is missing or wrong: start workers by `trainyard run`"
    )]
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

/// This host's holder, where workers learn of the others' when they meet.
#[derive(Debug)]
pub struct OwnHolder {
    /// `HOST:PORT`, as others reach it.
    pub address: String,
    secret: Secret,
}

impl OwnHolder {
    /// The holder that the launcher has named; none when it has not.
    pub fn from_environment(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<OwnHolder>, EnvironmentError> {
        let Some(address) = variable(HOLDER) else {
            return Ok(None);
        };
        let missing = EnvironmentError::Variable { name: SECRET_FILE };
        let secret = variable(SECRET_FILE).ok_or(missing)?;
        let secret = Secret::read(&PathBuf::from(secret))?;
        Ok(Some(OwnHolder { address, secret }))
    }

    /// The memory of all hosts' holders, which are given in the order of hosts.
    pub fn among(self, holders: &[String], own: usize) -> Result<PeerStore, EnvironmentError> {
        Ok(PeerStore::new(
            Neighbourhood::of(holders, own)?,
            self.secret,
        ))
    }
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

    #[test]
    fn a_holder_of_its_own_joins_those_that_are_met() {
        let shared = Secret::generate().unwrap();
        let path = shared.path.display().to_string();
        let with = |name: &str| match name {
            HOLDER => Some("b:2".to_owned()),
            SECRET_FILE => Some(path.clone()),
            _ => None,
        };
        let own = OwnHolder::from_environment(with).unwrap().unwrap();
        let all = ["a:1".to_owned(), own.address.clone()];
        assert!(own.among(&all, 1).is_ok());
        assert!(OwnHolder::from_environment(|_| None).unwrap().is_none());
    }
}

//! How a worker finds the replica servers: by environment variables that the launcher sets.

use std::path::PathBuf;

use trainyard_tls::{RunSecret, SecretError, TlsError};

use crate::{PeerStore, PlacementError, ReplicaPlacement};

/// The replica servers of all nodes, `HOST:PORT,HOST:PORT`, in the order of nodes.
pub const REPLICA_SERVERS: &str = "TRAINYARD_REPLICA_SERVERS";
/// The replica server of this node, in an elastic run: workers exchange the addresses of the others.
pub const REPLICA_SERVER: &str = "TRAINYARD_REPLICA_SERVER";
/// The index of this node's server in [`REPLICA_SERVERS`].
pub const REPLICA_SERVER_INDEX: &str = "TRAINYARD_REPLICA_SERVER_INDEX";
/// The path of the file with the run secret. The secret itself is in no environment.
pub const SECRET_FILE: &str = "TRAINYARD_SECRET_FILE";

/// The environment names replica servers that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EnvironmentError {
    /// A variable is missing or is not a number.
    #[error(
        "there are replica servers, but {name} is missing or invalid: start workers by `trainyard run`"
    )]
    Variable {
        /// The name of the variable.
        name: &'static str,
    },
    /// The list of replica servers is invalid.
    #[error("{REPLICA_SERVERS}: {0}")]
    Placement(#[from] PlacementError),
    /// The run secret cannot be used.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The keys of the run cannot be derived.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// The replica server of this node in an elastic run, where workers exchange the addresses of the others.
#[derive(Debug)]
pub struct LocalReplicaServer {
    /// `HOST:PORT`, as other nodes reach it.
    pub address: String,
    secret: RunSecret,
}

impl LocalReplicaServer {
    /// The replica server that the launcher has named; `None` if it has not named one.
    pub fn from_environment(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<LocalReplicaServer>, EnvironmentError> {
        let Some(address) = variable(REPLICA_SERVER) else {
            return Ok(None);
        };
        let missing = EnvironmentError::Variable { name: SECRET_FILE };
        let secret = variable(SECRET_FILE).ok_or(missing)?;
        let secret = RunSecret::read(&PathBuf::from(secret))?;
        Ok(Some(LocalReplicaServer { address, secret }))
    }

    /// The store on all replica servers of the run, given in the order of nodes; this node's has index `node`.
    pub fn join_peers(
        self,
        servers: &[String],
        node: usize,
    ) -> Result<PeerStore, EnvironmentError> {
        let placement = ReplicaPlacement::new(servers, node)?;
        Ok(PeerStore::new(&placement, &self.secret)?)
    }
}

/// The store on the replica servers that the environment names; `None` if it names none.
pub fn from_environment(
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<PeerStore>, EnvironmentError> {
    let Some(servers) = variable(REPLICA_SERVERS) else {
        return Ok(None);
    };
    let missing = |name| EnvironmentError::Variable { name };
    let index = variable(REPLICA_SERVER_INDEX).and_then(|index| index.parse().ok());
    let index = index.ok_or_else(|| missing(REPLICA_SERVER_INDEX))?;
    let secret = variable(SECRET_FILE).ok_or_else(|| missing(SECRET_FILE))?;
    let placement = ReplicaPlacement::parse(&servers, index)?;
    let secret = RunSecret::read(&PathBuf::from(secret))?;
    Ok(Some(PeerStore::new(&placement, &secret)?))
}

#[cfg(test)]
mod tests {
    use trainyard_tls::SecretFile;

    use super::*;

    #[test]
    fn the_variables_must_be_complete() {
        let secret = SecretFile::random().unwrap();
        let path = secret.path.display().to_string();
        let all = [
            (REPLICA_SERVERS, "a:1,b:2"),
            (REPLICA_SERVER_INDEX, "1"),
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
        assert!(with(&[all[0], (REPLICA_SERVER_INDEX, "2"), all[2]]).is_err());
    }

    #[test]
    fn a_local_server_joins_its_peers() {
        let secret = SecretFile::random().unwrap();
        let path = secret.path.display().to_string();
        let with = |name: &str| match name {
            REPLICA_SERVER => Some("b:2".to_owned()),
            SECRET_FILE => Some(path.clone()),
            _ => None,
        };
        let local = LocalReplicaServer::from_environment(with).unwrap().unwrap();
        let all = ["a:1".to_owned(), local.address.clone()];
        assert!(local.join_peers(&all, 1).is_ok());
        assert!(
            LocalReplicaServer::from_environment(|_| None)
                .unwrap()
                .is_none()
        );
    }
}

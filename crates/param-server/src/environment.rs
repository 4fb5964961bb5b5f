//! How a process finds out that it is a server or a worker: by environment variables that the launcher sets.

/// The parameter servers, `HOST:PORT,HOST:PORT`; the first one is the leader.
pub const SERVERS: &str = "TRAINYARD_PARAMETER_SERVERS";
/// Set for servers only. The address of a server has the index of its rank.
pub const IS_SERVER: &str = "TRAINYARD_IS_PARAMETER_SERVER";
/// The number of workers that the run starts with.
pub const NUM_WORKERS: &str = "TRAINYARD_NUM_WORKERS";
/// The ranks of each worker.
pub const RANKS_PER_WORKER: &str = "TRAINYARD_RANKS_PER_WORKER";

const RANK: &str = "RANK";

/// The environment names parameter servers in a way that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} = {value:?} is not valid: start servers and workers by `trainyard run --servers`")]
pub struct EnvironmentError {
    /// The name of the variable.
    pub name: &'static str,
    /// Its value.
    pub value: String,
}

/// The part that this process has in a run with parameter servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// It serves parameters at this address.
    Server {
        /// The address.
        address: String,
        /// The number of workers that the run starts with.
        num_workers: usize,
        /// The ranks of each of them.
        ranks_per_worker: usize,
    },
    /// It computes gradients.
    Worker {
        /// The servers, the leader first.
        servers: Vec<String>,
    },
}

impl Role {
    /// The role that the launcher has given to this process; `None` without parameter servers.
    pub fn from_environment(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Role>, EnvironmentError> {
        let Some(list) = variable(SERVERS) else {
            return Ok(None);
        };
        let servers: Vec<String> = list.split(',').map(str::to_owned).collect();
        if variable(IS_SERVER).is_none() {
            return Ok(Some(Role::Worker { servers }));
        }
        let index = variable(RANK).unwrap_or_default();
        let address = index
            .parse()
            .ok()
            .and_then(|index: usize| servers.get(index));
        let address = address.cloned().ok_or(EnvironmentError {
            name: RANK,
            value: index.clone(),
        })?;
        let number = |name: &'static str| {
            let value = variable(name).unwrap_or_default();
            let number = value.parse();
            number.map_err(|_| EnvironmentError { name, value })
        };
        Ok(Some(Role::Server {
            address,
            num_workers: number(NUM_WORKERS)?,
            ranks_per_worker: number(RANKS_PER_WORKER)?,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_launcher_says_who_is_a_server() {
        let role = |variables: &[(&str, &str)]| {
            let find = |name: &str| variables.iter().find(|(key, _)| *key == name);
            Role::from_environment(|name| find(name).map(|(_, value)| (*value).to_owned()))
        };
        let servers = (SERVERS, "a:1,b:2");
        assert_eq!(role(&[]), Ok(None));
        let worker = Role::Worker {
            servers: vec!["a:1".to_owned(), "b:2".to_owned()],
        };
        assert_eq!(role(&[servers]), Ok(Some(worker)));
        let server = Role::Server {
            address: "b:2".to_owned(),
            num_workers: 4,
            ranks_per_worker: 2,
        };
        let (is_server, rank) = ((IS_SERVER, "1"), (RANK, "1"));
        let (workers, ranks) = ((NUM_WORKERS, "4"), (RANKS_PER_WORKER, "2"));
        let found = role(&[servers, is_server, rank, workers, ranks]);
        assert_eq!(found, Ok(Some(server)));
        assert!(role(&[servers, is_server, rank, ranks]).is_err());
        assert!(role(&[servers, is_server, rank, workers]).is_err());
        assert!(role(&[servers, is_server, (RANK, "2"), workers, ranks]).is_err());
    }
}

//! Why a step had values that are not finite: what happens when its samples are computed again, first by the ranks
//! that had them, then by other replicas.
//!
//! What comes from the samples or the parameters appears wherever it is computed. What one rank computes wrong appears
//! on that rank only. What does not appear again was a transient fault.

use std::fmt;

/// The result of computing a step again. A share is the part of a global batch that one replica computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// All values are finite now.
    Transient,
    /// These replicas compute values that are not finite, and others do not from the same samples.
    Persistent {
        /// The indices of the replicas along the data-parallel axes.
        replicas: Vec<usize>,
    },
    /// Every replica computes values that are not finite from these shares.
    InData {
        /// The indices of the shares.
        shares: Vec<usize>,
    },
    /// The values are not finite again, and there is no other replica to compare with.
    Reproduced,
}

/// The verdict from which shares were not finite when their own replica computed them again, and when the replica
/// before it did; `None` if there is only one replica.
pub(crate) fn verdict(own: &[bool], other: Option<&[bool]>) -> Verdict {
    let indices =
        |is_bad: &dyn Fn(usize) -> bool| (0..own.len()).filter(|&at| is_bad(at)).collect();
    let Some(other) = other else {
        let is_bad = own.contains(&true);
        return if is_bad {
            Verdict::Reproduced
        } else {
            Verdict::Transient
        };
    };
    let shares: Vec<usize> = indices(&|at| own[at] && other[at]);
    if !shares.is_empty() {
        return Verdict::InData { shares };
    }
    // A replica is at fault if its own share is bad only there, or if it spoils the share after it.
    let replicas: Vec<usize> = indices(&|at| own[at] || other[(at + 1) % own.len()]);
    if replicas.is_empty() {
        Verdict::Transient
    } else {
        Verdict::Persistent { replicas }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |numbers: &[usize]| {
            let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
            numbers.join(", ")
        };
        match self {
            Verdict::Transient => {
                write!(
                    f,
                    "computed again, all values are finite: a transient fault"
                )
            }
            Verdict::Persistent { replicas } => write!(
                f,
                "computed again, only data-parallel replica {} has such values: its device or node is at fault",
                list(replicas)
            ),
            Verdict::InData { shares } => write!(
                f,
                "computed again, every replica has such values from share {} of the batch: they come from the data or \
                 the parameters",
                list(shares)
            ),
            Verdict::Reproduced => write!(
                f,
                "computed again, the values are the same: there is no other replica to tell the data from the device"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_follows_where_values_are_bad() {
        let good = [false; 3];
        let first = [true, false, false];
        assert_eq!(verdict(&good, None), Verdict::Transient);
        assert_eq!(verdict(&first, None), Verdict::Reproduced);
        assert_eq!(verdict(&good, Some(&good)), Verdict::Transient);
        let shares = vec![0];
        assert_eq!(verdict(&first, Some(&first)), Verdict::InData { shares });
        // Replica 0 spoils its own share, and then share 1.
        let replicas = vec![0];
        assert_eq!(
            verdict(&first, Some(&[false, true, false])),
            Verdict::Persistent { replicas }
        );
        let replicas = vec![2];
        assert_eq!(
            verdict(&good, Some(&first)),
            Verdict::Persistent { replicas },
            "only the second time"
        );
    }
}

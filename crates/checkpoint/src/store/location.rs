//! Parsing of store locations: a path of a file system, or the URL of a bucket.

use std::path::{Path, PathBuf};

use crate::{CheckpointError, Result};

/// The location of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A directory of a file system.
    Dir(PathBuf),
    /// A prefix of a bucket in an object store.
    Bucket {
        /// The name of the bucket.
        bucket: String,
        /// The prefix of all object names, without a `/` at either end.
        prefix: String,
    },
}

impl Location {
    /// Parses `dir/sub`, `file:///dir/sub` or `s3://bucket/prefix`.
    pub fn parse(location: &Path) -> Result<Location> {
        let invalid = |reason: String| CheckpointError::Location {
            location: location.display().to_string(),
            reason,
        };
        let Some((scheme, rest)) = location.to_str().and_then(split_scheme) else {
            return Ok(Location::Dir(location.to_owned()));
        };
        match scheme {
            "file" if rest.starts_with('/') => Ok(Location::Dir(rest.into())),
            "file" => Err(invalid(
                "not a valid URL: write file:///directory, with three slashes, or the path alone"
                    .to_owned(),
            )),
            "s3" => {
                let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
                if bucket.is_empty() {
                    return Err(invalid(
                        "the URL has no bucket: write s3://bucket/prefix".to_owned(),
                    ));
                }
                Ok(Location::Bucket {
                    bucket: bucket.to_owned(),
                    prefix: prefix.trim_matches('/').to_owned(),
                })
            }
            other => Err(invalid(format!(
                "{other}:// is not supported: write a path, file:///directory or s3://bucket/prefix"
            ))),
        }
    }

    /// Parses a location. A relative path is relative to `dir`; URLs are absolute.
    pub fn parse_under(dir: &Path, location: &Path) -> Result<Location> {
        match location.to_str().and_then(split_scheme) {
            Some(_) => Location::parse(location),
            None => Location::parse(&dir.join(location)),
        }
    }
}

/// Splits a URL into its scheme and the rest; `None` if `text` is not a URL.
fn split_scheme(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once("://")?;
    let is_ordinary = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic());
    (is_scheme && scheme.chars().all(is_ordinary)).then_some((scheme, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Location> {
        Location::parse(Path::new(text))
    }

    fn bucket(bucket: &str, prefix: &str) -> Location {
        Location::Bucket {
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
        }
    }

    #[test]
    fn paths_and_urls_are_distinguished() {
        for path in ["outputs/checkpoint", "/a/b", ".", "", "a:b", "a/s3://b"] {
            assert_eq!(parse(path).unwrap(), Location::Dir(path.into()));
        }
        assert_eq!(parse("file:///a/b").unwrap(), Location::Dir("/a/b".into()));
        assert_eq!(parse("s3://mine").unwrap(), bucket("mine", ""));
        assert_eq!(parse("s3://mine/a/b/").unwrap(), bucket("mine", "a/b"));
    }

    #[test]
    fn invalid_locations_are_rejected() {
        let rejection = |text: &str| parse(text).unwrap_err().to_string();
        assert!(rejection("gs://mine/a").contains("gs:// is not supported"));
        assert!(rejection("gs://mine/a").contains("s3://bucket/prefix"));
        assert!(rejection("s3:///a").contains("no bucket"));
        assert!(rejection("file://a").contains("three slashes"));
    }

    #[test]
    fn only_relative_paths_are_joined() {
        let under =
            |location: &str| Location::parse_under(Path::new("outputs"), Path::new(location));
        assert_eq!(under("a").unwrap(), Location::Dir("outputs/a".into()));
        assert_eq!(under("/a").unwrap(), Location::Dir("/a".into()));
        assert_eq!(under("s3://mine/a").unwrap(), bucket("mine", "a"));
    }
}

//! Runs the executable as a user does.

mod cluster;
mod plan;
mod run;
mod verify;

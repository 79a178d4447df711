//! Stands for the crate `egress` until it is merged.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use egress_protocol::{EgressReply, EgressReplyBody, EgressRequest};
use rustix::event::{PollFd, PollFlags, poll};

pub(crate) struct EgressOptions {
    pub keeper: OwnedFd,
    pub server_listener: Option<OwnedFd>,
}

pub(crate) fn run(options: EgressOptions) -> io::Result<()> {
    let mut held = Vec::new();
    let _listener = options.server_listener;
    loop {
        poll(&mut [PollFd::new(&options.keeper, PollFlags::IN)], None)?;
        match linux::packet::receive_with_descriptors::<EgressRequest>(options.keeper.as_fd())? {
            None => return Ok(()),
            Some((request, sockets)) => {
                tracing::info!(?request, "egress request");
                held.push(sockets);
                let reply = EgressReply { number: request.number, body: EgressReplyBody::Done };
                linux::packet::send_message(options.keeper.as_fd(), &reply, None)?;
            }
        }
    }
}

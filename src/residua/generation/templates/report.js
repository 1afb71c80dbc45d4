"use strict";
const player = document.getElementById("player");
const videos = [...player.querySelectorAll("video")];
const slider = document.getElementById("slider");
const button = document.getElementById("play");
const counter = document.getElementById("frame");
const frames = Number(player.dataset.frames);
const fps = Number(player.dataset.fps);
let playing = false;

function label(frame) {
  slider.value = frame;
  counter.textContent = `${frame + 1} / ${frames}`;
}

// The middle of a frame: its edges belong to two frames.
function show(frame) {
  for (const video of videos) video.currentTime = (frame + 0.5) / fps;
  label(frame);
}

function current() {
  return Math.min(frames - 1, Math.floor(videos[0].currentTime * fps));
}

function follow() {
  if (!playing) return;
  const [leader, ...others] = videos;
  for (const video of others) {
    if (Math.abs(video.currentTime - leader.currentTime) > 0.5 / fps) video.currentTime = leader.currentTime;
  }
  label(current());
  requestAnimationFrame(follow);
}

function toggle(on) {
  playing = on;
  button.textContent = on ? "Pause" : "Play";
  for (const video of videos) {
    if (on) video.play();
    else video.pause();
  }
  if (on) follow();
  else show(current());
}

for (const video of videos) video.loop = true;
slider.addEventListener("input", () => {
  const wanted = Number(slider.value);
  if (playing) toggle(false);
  show(wanted);
});
button.addEventListener("click", () => toggle(!playing));
show(Math.floor(frames / 2));
